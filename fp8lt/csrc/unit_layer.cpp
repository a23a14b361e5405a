// One translation unit of the layer's files: most of the time of compiling them goes into PyTorch's
// headers, which they share. build.py compiles no file by itself that is included here.

#include "linear.cpp"
#include "gradients.cpp"
#include "operands.cpp"
#include "shared_input.cpp"
#include "bindings.cpp"
