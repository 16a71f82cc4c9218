"""The command line: one file a verb, each parses, calls one function below, and prints."""
