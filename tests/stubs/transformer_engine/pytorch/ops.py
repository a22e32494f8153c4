"""Only base classes here, of the fused MLP, which nothing asks for."""


class Sequential:
    pass


class FusibleOperation:
    pass
