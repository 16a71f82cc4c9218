"""Models and data sets on Hugging Face's and ModelScope's hubs, fetched into the hub library's own cache."""
