"""What `explain` says in Chinese. Imported only where Chinese is asked for."""
