from .tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    pass
