"""The conductor process and its gateway: who runs where, in what order, by what deadline. No torch."""
