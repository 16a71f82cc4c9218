"""The web page of runs, and reports of them in one file."""
