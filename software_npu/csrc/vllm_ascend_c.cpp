// Stands in for vllm_ascend.vllm_ascend_C, the compiled part of vllm-ascend, as far as its sleep mode goes: an
// allocator to plug into torch whose memory can be taken away and given back at the same address. What owns a
// piece of memory, Python is told by a tuple (device, bytes, address, handle).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "driver.h"

namespace {

PyObject* on_malloc = nullptr;
PyObject* on_free = nullptr;

size_t aligned(size_t bytes) { return (bytes + snpu_granularity() - 1) / snpu_granularity() * snpu_granularity(); }

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

PyObject* init_module(PyObject*, PyObject* args) {
  PyObject *taken = nullptr, *given = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &taken, &given)) return nullptr;
  if (!PyCallable_Check(taken) || !PyCallable_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "both arguments must be callable");
    return nullptr;
  }
  Py_INCREF(taken);
  Py_INCREF(given);
  Py_XDECREF(on_malloc);
  Py_XDECREF(on_free);
  on_malloc = taken;
  on_free = given;
  Py_RETURN_NONE;
}

bool parse(PyObject* args, void** address) {
  unsigned long long device = 0, bytes = 0, first = 0, handle = 0;
  if (!PyArg_ParseTuple(args, "KKKK", &device, &bytes, &first, &handle)) return false;
  *address = reinterpret_cast<void*>(first);
  return true;
}

PyObject* create_and_map(PyObject*, PyObject* args) {
  void* address = nullptr;
  if (!parse(args, &address)) return nullptr;
  if (!snpu_map(address)) {
    PyErr_SetString(PyExc_RuntimeError, "NPU out of memory: cannot map memory to wake up");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* unmap_and_release(PyObject*, PyObject* args) {
  void* address = nullptr;
  if (!parse(args, &address)) return nullptr;
  snpu_unmap(address);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"init_module", init_module, METH_VARARGS, "Set the functions that are told of memory taken and given back."},
    {"python_create_and_map", create_and_map, METH_VARARGS, "Put memory behind a range of addresses."},
    {"python_unmap_and_release", unmap_and_release, METH_VARARGS, "Take it away; its contents are lost."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "vllm_ascend_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* my_malloc(ssize_t bytes, int device, void*) {
  void* address = snpu_reserve(bytes, device);
  if (!address) return nullptr;
  if (!snpu_map(address)) {
    snpu_release(address);
    return nullptr;
  }
  const Gil gil;
  PyObject* told = on_malloc ? PyObject_CallFunction(on_malloc, "((KKKK))", static_cast<unsigned long long>(device),
                                                     static_cast<unsigned long long>(aligned(bytes)),
                                                     reinterpret_cast<unsigned long long>(address),
                                                     reinterpret_cast<unsigned long long>(address))
                             : nullptr;
  if (!told) PyErr_WriteUnraisable(on_malloc);
  Py_XDECREF(told);
  return address;
}

__attribute__((visibility("default"))) void my_free(void* address, ssize_t, int, void*) {
  if (Py_IsInitialized()) {
    const Gil gil;
    PyObject* handle = on_free ? PyObject_CallFunction(on_free, "K", reinterpret_cast<unsigned long long>(address))
                               : nullptr;
    if (!handle) PyErr_WriteUnraisable(on_free);
    Py_XDECREF(handle);
  }
  snpu_release(address);
}

PyMODINIT_FUNC PyInit_vllm_ascend_C() { return PyModule_Create(&module); }
}
