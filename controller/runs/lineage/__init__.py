"""From rows to models and back: `areal-like lineage`."""
