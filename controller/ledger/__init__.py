"""What survives a crash: the SQLite ledger, its segment files, its mirror, and the audit."""
