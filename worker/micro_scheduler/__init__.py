"""Pure step-level decisions: which batch steps next."""
