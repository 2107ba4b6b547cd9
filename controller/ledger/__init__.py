"""The durable record of a run: the SQLite ledger, its segment files, its mirror, and the audit."""
