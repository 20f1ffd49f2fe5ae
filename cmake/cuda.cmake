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

# Which GPUs: as asked, else the ones present, else Hopper. The newest also as PTX, which the driver
# compiles for GPUs that came later.
set(cuda_architectures "${JAX_GN_CUDA_ARCHITECTURES}")
if(NOT cuda_architectures)
  set(cuda_architectures "${gpu_capabilities}")
endif()
if(NOT cuda_architectures)
  set(cuda_architectures 90)
endif()
set(CMAKE_CUDA_COMPILER "${JAX_GN_NVCC}")
set(CMAKE_CUDA_ARCHITECTURES "${cuda_architectures}")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
message(STATUS "jax_gn: CUDA architectures ${CMAKE_CUDA_ARCHITECTURES}, "
               "nvcc ${CMAKE_CUDA_COMPILER_VERSION}")

file(GLOB cuda_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/ffi/cuda/*.cu")
add_library(jax_gn_cuda STATIC ${cuda_sources})
target_include_directories(jax_gn_cuda PUBLIC ffi)
# Warnings of the host compiler, and ptxas' about spills.
target_compile_options(jax_gn_cuda PRIVATE -Xcompiler=-Wall -Xptxas=-warn-spills)

nanobind_add_module(_cuda STABLE_ABI NB_STATIC NOMINSIZE ffi/cuda_module.cc)
target_include_directories(_cuda SYSTEM PRIVATE ${JAX_GN_XLA_INCLUDE}
                                                ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(_cuda PRIVATE jax_gn_cuda jax_gn_plan CUDA::cudart_static)
# As for _cpu, and XLA's CUDA plugin has a CUDA runtime of its own.
target_link_options(_cuda PRIVATE LINKER:--exclude-libs,ALL)
# packaging/cuda13 installs this component alone, into a package of its own.
set(JAX_GN_CUDA_DESTINATION jax_gn CACHE STRING "Package that the CUDA module is installed into")
install(TARGETS _cuda LIBRARY DESTINATION ${JAX_GN_CUDA_DESTINATION} COMPONENT cuda)

# The native harness of the kernels: tools/gpu.sh builds and runs it.
option(JAX_GN_CUDA_HARNESS "Build tests/native/cuda_harness" OFF)
if(JAX_GN_CUDA_HARNESS)
  add_executable(cuda_harness tests/native/cuda_harness.cu tests/native/cases.cc
                              tests/native/reference.cc tests/native/timing.cu
                              tests/native/planted.cu)
  target_link_libraries(cuda_harness PRIVATE jax_gn_cuda jax_gn_plan)
endif()
