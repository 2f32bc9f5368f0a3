"""Networks: torsos, memory, heads, and the normalisation of what goes in."""
