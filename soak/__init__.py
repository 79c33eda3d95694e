"""Long runs that can be stopped and go on where they were; `scripts/soak` starts them."""
