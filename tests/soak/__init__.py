"""Long runs that can be stopped and resumed; `scripts/soak` starts them."""
