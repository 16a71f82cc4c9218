"""Images and videos of a row: their sizes in tokens, their pixels, their positions."""
