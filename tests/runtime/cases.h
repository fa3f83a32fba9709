/* cases.h: every case of the test program; each is `void case_NAME(void)` in case_NAME.c, but fork's
 * is in case_engine.c. */
#define TEST_CASES(X)                                                                              \
  X(base)                                                                                          \
  X(pool)                                                                                          \
  X(llc)                                                                                           \
  X(learn)                                                                                         \
  X(nets)                                                                                          \
  X(kv)                                                                                            \
  X(sample)                                                                                        \
  X(weights)                                                                                       \
  X(engine)                                                                                        \
  X(fork)                                                                                          \
  X(cuda)                                                                                          \
  X(gpu)                                                                                           \
  X(kernels)
