"""Files of anybody: read within bounds, told apart, and found by what --model says. No torch."""
