"""Policy gradients as pure functions, and as objectives of the engine."""
