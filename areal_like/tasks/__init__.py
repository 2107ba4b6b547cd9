"""Built-in tasks: generators of rows and parsers of answers."""
