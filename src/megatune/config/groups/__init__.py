"""The groups of settings, a file for each concern."""
