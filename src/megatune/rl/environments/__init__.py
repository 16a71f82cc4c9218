"""What answers a turn of the model, so that a response has several."""
