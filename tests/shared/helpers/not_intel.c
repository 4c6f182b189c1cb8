/* Preloaded, tells MKL that the processor is not Intel's: it then takes the code paths that it takes on an AMD processor.

Settings that were tried on an Intel Xeon with AVX-512, and what they switch:
  this file preloaded: products depend on addresses; exactly the tests that failed on an AMD EPYC with AVX2 fail
  MKL_ENABLE_INSTRUCTIONS=SSE4_2: attention depends on addresses; Intel only
  MKL_ENABLE_INSTRUCTIONS=AVX2, MKL_CBWR=AVX2: other bits, but the same at every address; Intel only
  MKL_CBWR=COMPATIBLE: the same bits at every address; up to 5 times slower; accepted only before MKL's first product
  ATEN_CPU_CAPABILITY=avx2, default: torch's own kernels, no products
  ONEDNN_MAX_CPU_ISA=AVX2: oneDNN's convolutions and bfloat16 products, no float32 products */
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
