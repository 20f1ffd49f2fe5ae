# The CUDA module: where nvcc is, whether to build, for which architectures.

# nvcc: on the PATH, in CUDA_HOME, or from PyPI (nvidia-cuda-nvcc and its companions).
jax_gn_ask_python(
  nvidia_root
  "import importlib.util as u; s = u.find_spec('nvidia'); print(s.submodule_search_locations[0] if s else '')"
  "Python can't look up the package nvidia")
find_program(JAX_GN_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin ${nvidia_root}/cu13/bin
             ${nvidia_root}/cuda_nvcc/bin)
find_program(JAX_GN_NVIDIA_SMI nvidia-smi HINTS /usr/local/nvidia/bin)
set(gpu_capabilities "")
if(JAX_GN_NVIDIA_SMI)
  execute_process(COMMAND ${JAX_GN_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE gpu_capabilities ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" gpu_capabilities "${gpu_capabilities}")
  string(REPLACE "." "" gpu_capabilities "${gpu_capabilities}")
  list(REMOVE_DUPLICATES gpu_capabilities)
endif()

if(JAX_GN_CUDA STREQUAL "AUTO")
  if(JAX_GN_NVCC AND gpu_capabilities)
    set(build_cuda ON)
  else()
    set(build_cuda OFF)
  endif()
elseif(JAX_GN_CUDA STREQUAL "ON")
  if(NOT JAX_GN_NVCC)
    message(FATAL_ERROR
      "JAX_GN_CUDA=ON, but there is no nvcc on the PATH, in CUDA_HOME or from PyPI. Install a CUDA "
      "toolkit, or `pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime "
      "nvidia-cuda-cccl` (with --no-build-isolation), or build with -C cmake.define.JAX_GN_CUDA=OFF.")
  endif()
  set(build_cuda ON)
elseif(JAX_GN_CUDA STREQUAL "OFF")
  set(build_cuda OFF)
else()
  message(FATAL_ERROR "JAX_GN_CUDA must be OFF, ON or AUTO, got ${JAX_GN_CUDA}")
endif()
message(STATUS "jax_gn: CUDA module ${build_cuda} (JAX_GN_CUDA=${JAX_GN_CUDA}, nvcc ${JAX_GN_NVCC}, "
               "GPUs ${gpu_capabilities})")
if(NOT build_cuda)
  return()
endif()
