// Plays calls of this library from a list, one after another, without coming back to Python.

#ifndef __x86_64__
#error "the calling convention used here is that of x86-64 Linux"
#endif

namespace {

constexpr int INTEGERS = 16, FLOATS = 4;

// Integers and addresses travel apart from floats: the first six in registers, the others on the
// stack in order; floats in registers of their own. A function that takes fewer never looks at the
// rest. So one type of call serves all functions (System V ABI, AMD64 supplement, 3.2.3).
using Function = void (*)(long, long, long, long, long, long, long, long, long, long, long, long, long,
                          long, long, long, float, float, float, float);

struct Call {
  Function function;
  long integers[INTEGERS];
  float floats[FLOATS];
};

}  // namespace

extern "C" void lpx_play(const void* list, long count) {
  const Call* calls = (const Call*)list;
  for (long c = 0; c < count; c++) {
    const long* i = calls[c].integers;
    const float* f = calls[c].floats;
    calls[c].function(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12],
                      i[13], i[14], i[15], f[0], f[1], f[2], f[3]);
  }
}
