/* Pages of one piece between two pools (runtime/page_copy.py): a small library of its own, so that it is there without the kernels. */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* `count` pieces of `bytes` each, between pages that lie a stride apart: to page to_pages[i] of `to` from page from_pages[i] of
   `from`. */
EXPORT void forebay_copy_pages(char *to, int64_t to_stride, const int64_t *to_pages, const char *from, int64_t from_stride,
                               const int64_t *from_pages, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) memcpy(to + to_pages[i] * to_stride, from + from_pages[i] * from_stride, (size_t)bytes);
}
