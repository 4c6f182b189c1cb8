/* Preloaded, tells MKL that the processor is not Intel's: it then takes the code paths that it takes on an AMD processor. */
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
