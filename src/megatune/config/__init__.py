"""What a user asked for: typed settings, the dialects they are read from, and the rules that span them."""
