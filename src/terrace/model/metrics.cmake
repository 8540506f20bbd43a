# ClickMetrics, a library of its own: the evaluator and its tests need no network.
terrace_library(metrics
  SOURCES metrics.cc
  DEPS terrace::base PRIVATE_DEPS terrace::io)
terrace_test(model_metrics_test SOURCES metrics_test.cc DEPS terrace::metrics)
target_compile_definitions(model_metrics_test PRIVATE TERRACE_TESTDATA="${CMAKE_CURRENT_SOURCE_DIR}/testdata")
terrace_fuzz(model_metrics_fuzz SOURCES metrics_fuzz.cc DEPS terrace::metrics
  CORPUS testdata/metrics_fuzz)
