"""The driver: one step after another, what they print and what they leave behind."""
