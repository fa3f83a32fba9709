/* fake_nvrtc.c: a stand-in for NVRTC (tests/support/nvrtc.py), of whatever release: RELEASE and PTX say
 * which, SM_90 what it does first when it compiles for that. It knows sm_80 and sm_90, and its images
 * are the head of PTX alone. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char text[256];

int nvrtcGetNumSupportedArchs(int *out) {
  *out = 2;
  return 0;
}
int nvrtcGetSupportedArchs(int *out) {
  out[0] = 80, out[1] = 90;
  return 0;
}
int nvrtcCreateProgram(void **out, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names) {
  (void)source, (void)name, (void)headers, (void)texts, (void)names;
  *out = text;
  return 0;
}
int nvrtcDestroyProgram(void **program) {
  *program = NULL;
  return 0;
}
int nvrtcCompileProgram(void *program, int options, const char *const *option) {
  (void)program, (void)options;
  if (strstr(option[0], "sm_90")) SM_90;
  snprintf(text, sizeof text,
           "// Cuda compilation tools, release x, V%s\n.version %s\n.target sm%s\n", RELEASE, PTX,
           strrchr(option[0], '_'));
  return 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *out) {
  (void)program;
  *out = 1;
  return 0;
}
int nvrtcGetProgramLog(void *program, char *out) {
  (void)program;
  *out = 0;
  return 0;
}
int nvrtcGetPTXSize(void *program, size_t *out) {
  (void)program;
  *out = strlen(text) + 1;
  return 0;
}
int nvrtcGetPTX(void *program, char *out) {
  (void)program;
  memcpy(out, text, strlen(text) + 1);
  return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *out) {
  (void)program;
  *out = strlen(text);
  return 0;
}
int nvrtcGetCUBIN(void *program, char *out) {
  (void)program;
  memcpy(out, text, strlen(text));
  return 0;
}
