// A stand-in for NVRTC. Its "machine code" is a header and the source, which the stand-in for the driver reads. Like
// NVRTC, it fails if libnvrtc-builtins is neither loaded nor in the loader's folders.
#include <dlfcn.h>
#include <string.h>
#include <string>

namespace {
const char HEADER[] =
    "\x7f"
    "ELF stand-in ";
int major_version = 13, compiled;
}  // namespace

extern "C" {
int nvrtcVersion(int *major, int *minor) {
  *major = major_version, *minor = 0;
  return 0;
}
int nvrtcGetNumSupportedArchs(int *count) {
  *count = 2;
  return 0;
}
int nvrtcGetSupportedArchs(int *architectures) {
  architectures[0] = 90, architectures[1] = 100;
  return 0;
}
int nvrtcCreateProgram(std::string **program, const char *source, const char *, int, const char **, const char **) {
  *program = new std::string(source);
  return 0;
}
int nvrtcCompileProgram(std::string *program, int count, const char **options) {
  if (!dlopen("libnvrtc-builtins.so.stub", RTLD_LAZY)) return 7;
  std::string header = HEADER;
  for (int i = 0; i < count; i++) header += std::string(options[i]) + " ";
  *program = header + "\n" + *program;
  compiled++;
  return 0;
}
int nvrtcGetProgramLogSize(std::string *, size_t *size) {
  *size = 1;
  return 0;
}
int nvrtcGetProgramLog(std::string *, char *log) {
  *log = 0;
  return 0;
}
int nvrtcGetCUBINSize(std::string *program, size_t *size) {
  *size = program->size() + 1;
  return 0;
}
int nvrtcGetCUBIN(std::string *program, char *code) {
  memcpy(code, program->c_str(), program->size() + 1);
  return 0;
}
int nvrtcGetPTXSize(std::string *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(std::string *program, char *code) { return nvrtcGetCUBIN(program, code); }
int nvrtcDestroyProgram(std::string **program) {
  delete *program;
  return 0;
}
const char *nvrtcGetErrorString(int) { return "an error of the stand-in"; }

// For tests.
void stub_set_major(int major) { major_version = major; }
int stub_compiled() { return compiled; }
}
