"""What `megatune data stats` counts, prints and draws."""
