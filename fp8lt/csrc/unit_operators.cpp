// The same of the files of the operators; see unit_layer.cpp.

#include "gemm.cpp"
#include "gemm_op.cpp"
#include "autotune.cpp"
#include "quantize_ops.cpp"
#include "memory.cpp"
