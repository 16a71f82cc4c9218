"""What a run needs of its machines, looked at before it starts: each look is a check with a verdict and a fix."""
