"""The conductor and its gateway: who runs where, in what order, until when. No torch."""
