"""What `megatune data stats` counts, says and draws."""
