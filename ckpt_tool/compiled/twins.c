/* Items of a file that are compared with the first of their kind: what stands around a tensor's bytes, and no byte of
   the tensor. `formats/dcp_container/dcp_items.py` says what a twin is, and compares one item as this does all of a file.

   Nothing is refused here: what is no twin, or can't be read, is left to the caller. */

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef struct {
    int64_t head_size; /* bytes from an item's start */
    int64_t end_at;    /* of its end, from its start */
    int64_t end_size;
    int64_t crc[2], id_crc[2]; /* where in the end a CRC-32 stands twice */
    const uint8_t *head, *end, *fixed; /* fixed: 255 where the end is to be equal, else 0 */
} Kind;

/* Up to `size` bytes at `at` of the file; how many there were. */
static int64_t bytes_at(int fd, uint8_t *into, int64_t size, int64_t at)
{
    int64_t done = 0;
    while (done < size) {
        ssize_t part = pread(fd, into + done, (size_t)(size - done), (off_t)(at + done));
        if (part < 0 && errno == EINTR)
            continue;
        if (part <= 0)
            break;
        done += part;
    }
    return done;
}

static int same_end(const Kind *kind, const uint8_t *end)
{
    int wrong = 0;
    for (int64_t i = 0; i < kind->end_size; i++)
        wrong |= (end[i] ^ kind->end[i]) & kind->fixed[i];
    return !wrong && !memcmp(end + kind->crc[0], end + kind->crc[1], 4) &&
           !memcmp(end + kind->id_crc[0], end + kind->id_crc[1], 4);
}

/* Item i begins at byte at[i] of the file and is to be of kinds[kind[i]]: crc[i] is the CRC-32 of its tensor, -1 where
   it is no twin. head: room for the largest head; tail: for the largest end and the largest head. Returns how many
   bytes were read. */
API int64_t ck_twins(int fd, const Kind *kinds, int64_t items, const int64_t *at, const int32_t *kind, uint8_t *head,
                     uint8_t *tail, int64_t *crc)
{
    int64_t done = 0, start = 0, stop = 0; /* of the file's bytes that are in `tail` */
    for (int64_t i = 0; i < items; i++) {
        const Kind *k = kinds + kind[i];
        const uint8_t *first = tail + (at[i] - start);
        crc[i] = -1;
        if (at[i] < start || at[i] + k->head_size > stop) {
            first = head;
            int64_t found = bytes_at(fd, head, k->head_size, at[i]);
            done += found;
            if (found < k->head_size)
                continue;
        }
        if (memcmp(first, k->head, (size_t)k->head_size))
            continue;
        int64_t end = at[i] + k->end_at, behind = end + k->end_size, size = k->end_size;
        if (i + 1 < items && at[i + 1] == behind)
            size += kinds[kind[i + 1]].head_size; /* the next item's head comes with this one's end */
        start = end;
        stop = end + bytes_at(fd, tail, size, end);
        done += stop - start;
        if (stop < behind || !same_end(k, tail))
            continue;
        uint32_t value;
        memcpy(&value, tail + k->crc[0], 4);
        crc[i] = value;
    }
    return done;
}
