"""Encryption of a run's data at rest: key, file format, texts, and decrypted copies in memory (docs/encryption.md)."""
