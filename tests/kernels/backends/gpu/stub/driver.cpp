// A stand-in for the CUDA driver, libcuda.so.1, with the functions of the driver that CuPy and fewbits call. A launch
// copies its arguments, as the driver does, and runs the kernel on the SIMT emulator. The stand-in loads only modules
// of the stand-in for NVRTC (nvrtc.cpp): their "machine code" is the source, from which it reads the variant's
// constants.
//
// It reports these errors as a device does: a launch without a context, or with a stream or a module of another
// context; loading a module while a stream is captured; an image that NVRTC did not make.
#include "simt.h"

#include "decide.cu"
#include "decode.cu"
#include "layers.cu"
#include "observe.cu"
#include "quantize.cu"
#include "weights.cu"

#include <map>
#include <mutex>
#include <string>

extern "C" {  // simt/emulate.cpp
void simt_shuffle(uint64_t seed);
void simt_quantize(int kernel, int dtype, const fb::Variant *variant, unsigned blocks, unsigned shared,
                   const fb::Call *call);
void simt_decide(int kernel, int dtype, const fb::Variant *variant, unsigned blocks, unsigned shared,
                 const fb::DecideCall *call);
void simt_observe(int kernel, int dtype, const fb::Variant *variant, unsigned blocks, unsigned shared,
                  const fb::ObserveCall *call);
void simt_decode(int kernel, int dtype, const fb::Variant *variant, unsigned blocks, unsigned shared,
                 const fb::DecodeCall *call);
void simt_layers(int kernel, int dtype, int other, const fb::Variant *variant, unsigned blocks, unsigned shared,
                 const fb::LayerCall *call);
void simt_weights(int kernel, int dtype, int other, const fb::Variant *variant, unsigned blocks, unsigned shared,
                  const fb::WeightCall *call);
}

namespace {

enum Attribute { MAX_DYNAMIC_SHARED_SIZE_BYTES = 8, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97 };
enum Result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  UNSUPPORTED_PTX_VERSION = 222,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  CAPTURE_UNSUPPORTED = 900,
};
constexpr int DEVICES = 2;
// Bytes of dynamic shared memory that a CTA can have: by default, and at most if the function's attribute is set.
constexpr int USUAL_SHARED = 48 << 10, LARGEST_SHARED = 227 << 10;
constexpr char MAGIC[] =
    "\x7f"
    "ELF stand-in ";

struct Context {
  int device;
};
struct Module {
  Context *context;
  std::string file, kernel;
  int dtypes[2];
  fb::Variant variant;
  bool empty;   // the kernel does nothing; its launches are not recorded
  int dynamic;  // the most bytes of dynamic shared memory that a launch may ask for
};
struct Launch {  // tests/kernels/backends/gpu/stubbed.py has the same fields
  int32_t device, captured;
  uint32_t grid[3], threads[3], shared, bytes;
  uint64_t stream, thread;
  char kernel[32];
};

Context contexts[DEVICES] = {{0}, {1}};
thread_local Context *current;
std::mutex mutex;  // the emulator runs one launch at a time
std::vector<Launch> launches;
struct Node {  // a captured launch with a copy of its arguments
  Module *module;
  uint32_t blocks, shared;
  std::vector<char> arguments;
};
typedef std::vector<Node> Graph;
Graph *graph;  // of the capture that has begun
int version = 13000, loads, capturing;
bool executes = true;
uint64_t thread_count;
thread_local uint64_t own_thread;

// Return all integers in the text of a macro, in their order; braces are ignored.
std::vector<uint32_t> numbers(const std::string &text) {
  std::vector<uint32_t> found;
  for (const char *c = text.c_str(); *c;) {
    char *end = nullptr;
    if (*c >= '0' && *c <= '9') {
      found.push_back(uint32_t(strtoul(c, &end, 10)));
      c = end;
    } else {
      c++;
    }
  }
  return found;
}

int dtype_of(const std::string &name) { return name == "Bf16" ? 0 : name == "Fp16" ? 1 : 2; }

bool parse(const char *image, Module *module) {
  if (strncmp(image, MAGIC, sizeof(MAGIC) - 1)) return false;
  std::string text(image);
  module->empty = text.find("void run() {}") != std::string::npos;
  if (module->empty) return true;
  std::map<std::string, std::string> macros;
  for (size_t at = 0; (at = text.find("#define ", at)) != std::string::npos;) {
    size_t name = at + 8, space = text.find(' ', name), end = text.find('\n', space);
    macros[text.substr(name, space - name)] = text.substr(space + 1, end - space - 1);
    at = end;
  }
  size_t quote = text.find("#include \"");
  if (quote == std::string::npos || !macros.count("FB_SPECS")) return false;
  quote += 10;
  module->file = text.substr(quote, text.find('"', quote) - quote);
  module->kernel = macros["FB_KERNEL"];
  module->dtypes[0] = dtype_of(macros["FB_DTYPE"]);
  module->dtypes[1] = dtype_of(macros["FB_OTHER"]);
  std::vector<uint32_t> shape = numbers(macros["FB_SHAPE"]), specs = numbers(macros["FB_SPECS"]);
  const size_t count = numbers(macros["FB_COUNT"])[0];
  if (shape.size() * 4 != sizeof(fb::Shape) || specs.size() * 4 != count * sizeof(fb::Spec)) return false;
  module->variant = fb::Variant{};
  memcpy(&module->variant.shape, shape.data(), sizeof(fb::Shape));
  module->variant.count = int(count);
  memcpy(module->variant.specs, specs.data(), specs.size() * 4);
  return true;
}

size_t argument_bytes(const Module &m) {
  return m.file == "decide.cu"    ? sizeof(fb::DecideCall)
         : m.file == "decode.cu"  ? sizeof(fb::DecodeCall)
         : m.file == "layers.cu"  ? sizeof(fb::LayerCall)
         : m.file == "observe.cu" ? sizeof(fb::ObserveCall)
         : m.file == "weights.cu" ? sizeof(fb::WeightCall)
                                  : sizeof(fb::Call);
}

int index_of(const std::string &name, std::initializer_list<const char *> names) {
  int i = 0;
  for (const char *n : names) {
    if (name == n) return i;
    i++;
  }
  return -1;
}

void execute(const Module &m, unsigned blocks, unsigned shared, const void *arguments) {
  simt_shuffle(launches.size());
  if (m.file == "decide.cu") {
    simt_decide(0, 0, &m.variant, blocks, shared, (const fb::DecideCall *)arguments);
  } else if (m.file == "observe.cu") {
    simt_observe(0, 0, &m.variant, blocks, shared, (const fb::ObserveCall *)arguments);
  } else if (m.file == "decode.cu") {
    simt_decode(0, m.dtypes[0], &m.variant, blocks, shared, (const fb::DecodeCall *)arguments);
  } else if (m.file == "layers.cu") {
    int kernel = index_of(
        m.kernel, {"norm", "norm_backward", "norm_weights", "entropy", "entropy_backward", "rotate", "squared_relu",
                   "squared_relu_backward", "gelu", "gelu_backward", "swiglu", "swiglu_backward"});
    simt_layers(kernel, m.dtypes[0], m.dtypes[1], &m.variant, blocks, shared, (const fb::LayerCall *)arguments);
  } else if (m.file == "weights.cu") {
    int kernel = index_of(m.kernel, {"gaussian_noise", "uniform_noise", "sample_weight", "sample_weight_backward"});
    simt_weights(kernel, m.dtypes[0], m.dtypes[1], &m.variant, blocks, shared, (const fb::WeightCall *)arguments);
  } else {
    int kernel = index_of(m.kernel, {"quantize", "measure", "extent", "weigh", "quantize_strip"});
    simt_quantize(kernel, m.dtypes[0], &m.variant, blocks, shared, (const fb::Call *)arguments);
  }
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return SUCCESS; }
int cuGetExportTable(const void **table, const void *) {  // NVRTC asks for a table, but works without one
  *table = nullptr;
  return INVALID_VALUE;
}
int cuDriverGetVersion(int *v) {
  *v = version;
  return SUCCESS;
}
int cuGetErrorName(int error, const char **text) {
  static thread_local char name[32];
  snprintf(name, sizeof(name), "CUDA_ERROR_%d", error);
  *text = name;
  return SUCCESS;
}
int cuGetErrorString(int error, const char **text) {
  *text = error == INVALID_IMAGE         ? "device kernel image is invalid"
          : error == INVALID_CONTEXT     ? "invalid device context"
          : error == CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing"
                                         : "see the stand-in for the driver";
  return SUCCESS;
}
int cuDeviceGet(int *device, int index) {
  *device = index;
  return index < DEVICES ? SUCCESS : INVALID_VALUE;
}
int cuDeviceGetCount(int *count) {
  *count = DEVICES;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(Context **context, int device) {
  *context = &contexts[device];
  return SUCCESS;
}
int cuCtxGetCurrent(Context **context) {
  *context = current;
  return SUCCESS;
}
int cuCtxSetCurrent(Context *context) {
  current = context;
  return SUCCESS;
}
int cuModuleLoadData(Module **module, const void *image) {
  if (!current) return INVALID_CONTEXT;
  if (capturing) return CAPTURE_UNSUPPORTED;
  loads++;
  Module m{};
  if (!parse((const char *)image, &m)) return INVALID_IMAGE;
  m.context = current;
  m.dynamic = USUAL_SHARED;
  *module = new Module(m);
  return SUCCESS;
}
int cuModuleUnload(Module *module) {
  delete module;
  return SUCCESS;
}
int cuModuleGetFunction(Module **function, Module *module, const char *name) {
  *function = module;
  return strcmp(name, "run") ? NOT_FOUND : SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (attribute != MAX_SHARED_MEMORY_PER_BLOCK_OPTIN || device < 0 || device >= DEVICES) return INVALID_VALUE;
  *value = LARGEST_SHARED;
  return SUCCESS;
}
int cuFuncSetAttribute(Module *function, int attribute, int value) {
  if (attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > LARGEST_SHARED) return INVALID_VALUE;
  function->dynamic = value;
  return SUCCESS;
}
int cuLaunchKernel(Module *m, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra) {
  if (!current) return INVALID_CONTEXT;
  if (m->context != current) return INVALID_HANDLE;
  if (m->empty) return SUCCESS;
  // In tests a stream is the number 256 * device + n with 0 <= n < 256.
  if (stream && int(uint64_t(stream) >> 8) != current->device) return INVALID_HANDLE;
  if (extra || !x || !y || !z || !threads || int(threads) != m->variant.shape.threads) return INVALID_VALUE;
  if (int(shared) > m->dynamic) return INVALID_VALUE;
  std::lock_guard<std::mutex> hold(mutex);
  if (!own_thread) own_thread = ++thread_count;
  const uint32_t bytes = uint32_t(argument_bytes(*m));
  std::vector<char> copy((const char *)arguments[0], (const char *)arguments[0] + bytes);
  Launch l{current->device,  capturing,  {x, y, z}, {threads, threads_y, threads_z}, shared, bytes,
           uint64_t(stream), own_thread, {}};
  snprintf(l.kernel, sizeof(l.kernel), "%s", m->kernel.c_str());
  launches.push_back(l);
  if (graph) {
    graph->push_back(Node{m, x, shared, copy});
  } else if (executes && !capturing) {
    execute(*m, x, shared, copy.data());
  }
  return SUCCESS;
}
int cuStreamBeginCapture(void *, int) {
  if (graph) return CAPTURE_UNSUPPORTED;
  graph = new Graph, capturing = 1;
  return SUCCESS;
}
int cuStreamEndCapture(void *, Graph **result) {
  *result = graph;
  graph = nullptr, capturing = 0;
  return *result ? SUCCESS : INVALID_VALUE;
}
int cuGraphLaunch(Graph *replayed, void *) {
  std::lock_guard<std::mutex> hold(mutex);
  for (const Node &n : *replayed) execute(*n.module, n.blocks, n.shared, n.arguments.data());
  return SUCCESS;
}

// For tests.
void stub_reset() {
  launches.clear();
  version = 13000, loads = capturing = 0, executes = true, graph = nullptr;
}
void stub_set_version(int v) { version = v; }
void stub_set_capturing(int on) { capturing = on; }
void stub_set_executes(int on) { executes = on; }
void stub_make_current(int device) { current = device < 0 ? nullptr : &contexts[device]; }
int stub_current_device() { return current ? current->device : -1; }
int stub_loads() { return loads; }
int stub_launch_count() { return int(launches.size()); }
void stub_launch(int i, Launch *l) { *l = launches[size_t(i)]; }
}
