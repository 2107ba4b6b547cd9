"""The pure state machine of a run: events in, effects out; no I/O and no clock."""
