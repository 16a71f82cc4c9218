"""The vocabularies that settings are read from: tables from a dialect's keys to ours, with no logic of their own."""
