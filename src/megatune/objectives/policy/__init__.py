"""Policy gradient losses as pure functions and as objectives of the engine."""
