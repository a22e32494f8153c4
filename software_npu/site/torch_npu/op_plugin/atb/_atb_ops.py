def _register_atb_extensions() -> None:
    """operators.py has registered them."""
