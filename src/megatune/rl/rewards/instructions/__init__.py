"""Instructions whose keeping a program can check: IFEval's, by the names that the public training data gives them."""
