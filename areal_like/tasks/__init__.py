"""Tasks that are shipped with the package: generators of rows and readers of answers."""
