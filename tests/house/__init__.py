"""The house's own rules: layers, budgets, READMEs, examples."""
