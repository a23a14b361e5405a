// The layer as a Python function. A call through torch.ops converts each of its arguments
// by the operator's schema, which takes longer than a kernel launch; a call by Python's protocol
// does not. Where Python's headers are not installed there is none, and torch.ops serves.

#if __has_include(<Python.h>)

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "dispatch.h"
#include "linear.h"

namespace fp8lt {
namespace {

constexpr Py_ssize_t kArguments = 23;

// By pybind11's casters: torch's own header for this takes twice as long to compile.
using Caster = pybind11::detail::type_caster<at::Tensor>;

at::Tensor tensor(PyObject* argument) {
  Caster caster;
  TORCH_CHECK_TYPE(caster.load(argument, false), "fp8lt: want a tensor, got ",
                   Py_TYPE(argument)->tp_name);
  return std::move(static_cast<at::Tensor&>(caster));
}

std::optional<at::Tensor> optional_tensor(PyObject* argument) {
  if (argument == Py_None) return std::nullopt;
  return tensor(argument);
}

at::ScalarType dtype(PyObject* argument) {
  TORCH_CHECK_TYPE(THPDtype_Check(argument), "fp8lt: want a torch.dtype, got ",
                   Py_TYPE(argument)->tp_name);
  return reinterpret_cast<THPDtype*>(argument)->scalar_type;
}

bool flag(PyObject* argument) {
  const int truth = PyObject_IsTrue(argument);
  if (truth < 0) throw python_error();
  return truth == 1;
}

int64_t integer(PyObject* argument) {
  const int64_t value = PyLong_AsLongLong(argument);
  if (value == -1 && PyErr_Occurred() != nullptr) throw python_error();
  return value;
}

// Whether somebody wants to hear of the call itself, or to take it over: they hear of operators,
// which this function is not.
bool is_overridden(const at::Tensor& x, const at::Tensor& w,
                   const std::optional<at::Tensor>& bias) {
  switch (dispatch_key(x, w, bias.has_value() ? *bias : x)) {
    case c10::DispatchKey::AutogradCUDA:
    case c10::DispatchKey::AutogradCPU:
    case c10::DispatchKey::CUDA:
    case c10::DispatchKey::CPU:
      return false;
    default:
      return true;
  }
}

PyObject* call_linear(PyObject* /*module*/, PyObject* const* a, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == kArguments, "fp8lt: want ", kArguments, " arguments, got ", count);
  const at::Tensor x = tensor(a[0]), w = tensor(a[1]);
  const auto bias = optional_tensor(a[2]);
  if (is_overridden(x, w, bias)) Py_RETURN_NOTIMPLEMENTED;
  std::optional<Quantized> w_quantized;
  if (a[3] != Py_None) {
    w_quantized = Quantized{tensor(a[3]), tensor(a[4]), tensor(a[5]), tensor(a[6]), at::Tensor()};
  }
  MainGrad main_grad{optional_tensor(a[7]).value_or(at::Tensor()),
                     static_cast<MainGrad::Returns>(integer(a[8]))};
  const Histories histories{optional_tensor(a[9]).value_or(at::Tensor()),
                            optional_tensor(a[10]).value_or(at::Tensor()), flag(a[11])};
  const auto kind = static_cast<Recipe::Kind>(integer(a[12]));
  const auto forward_fp8 = dtype(a[13]), backward_fp8 = dtype(a[14]), out_dtype = dtype(a[15]);
  const Recipe recipe{kind,        forward_fp8, backward_fp8, flag(a[16]),    flag(a[17]),
                      flag(a[18]), flag(a[19]), flag(a[20]),  integer(a[21]), flag(a[22])};
  at::Tensor y;
  {
    const pybind11::gil_scoped_release no_gil;
    y = linear(x, w, bias, std::move(w_quantized), std::move(main_grad), histories, recipe,
               out_dtype);
  }
  return Caster::cast(y, pybind11::return_value_policy::move, {}).ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_linear)),
     METH_FASTCALL,
     "torch.ops.fp8lt.linear with less host time; NotImplemented where that must be called"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "fp8lt_native", nullptr, -1, methods};

}  // namespace
}  // namespace fp8lt

PyMODINIT_FUNC PyInit_fp8lt_native() { return PyModule_Create(&fp8lt::module); }

#endif
