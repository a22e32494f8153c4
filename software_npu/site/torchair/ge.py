class Tensor:
    """Only named in annotations."""


class TensorSpec:
    pass


class DataType:
    pass
