"""From a user's files to token rows and batches."""
