/* Rows of a pickle that repeat, taken as columns: objects of one class with a dict of fields, one behind the other.

   What a row looks like is a program of steps (rows.py makes it of a row that Python's machine has executed). A row is
   taken whole or not at all: at the first byte that the program does not foresee the call returns, and the machine goes
   on from there. So nothing is refused here, and nothing is guessed.

   The bytes are a stranger's: every read is held against `size`, nothing recurses, and what is kept (texts, and which
   memo entry is which text) takes a few bytes for each byte of the stream. Memory that is not there ends the taking. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum { NAME = 0, OPEN = 1, TEXT = 2, INT = 3, SKIP = 4, SIZE = 5, CLOSE = 6 }; /* steps; NAME and SIZE have an id */
enum { DIMS = 8, STEPS = 64, PROBES = 256, NONE = -1 };
enum { SYMBOL = 0xFF }; /* first byte of a name that is no text: UTF-8 has none such */

typedef struct {
    uint8_t *bytes; /* of all texts, one behind the other */
    int64_t used, room;
    int64_t *start; /* start[i], start[i + 1]: text i in bytes */
    int64_t texts, texts_room;
    int32_t *table; /* open addressing: id + 1 by hash, 0: free; at most half full */
    int64_t slots;
    int64_t *entry; /* memo indexes of texts, ascending, and the texts' ids */
    int32_t *entry_id;
    int64_t entries, entries_room;
} Rows;

typedef struct {
    int64_t rows_room, sizes_room; /* rows, and numbers of sizes, that there is room for */
    int32_t *ids;                  /* of TEXT steps */
    int64_t *ints;                 /* of INT steps */
    uint8_t *dims;                 /* of SIZE steps */
    int64_t *sizes;                /* the numbers of all sizes */
    int64_t rows, numbers;         /* how many were taken */
    int64_t at, memo, opcodes;     /* where the next row begins, the memo's length, opcodes that were taken */
} Taken;

typedef struct {
    const uint8_t *data;
    int64_t at, size, end; /* end: of the stream, which may lie beyond the window */
    int64_t memo, opcodes;
} Cursor;

static int grow(void **block, int64_t *room, int64_t wanted, size_t item)
{
    if (wanted <= *room)
        return 1;
    int64_t more = *room * 2 > wanted ? *room * 2 : wanted + 64;
    void *grown = realloc(*block, (size_t)more * item);
    if (!grown)
        return 0;
    *block = grown;
    *room = more;
    return 1;
}

API void ck_rows_free(Rows *r)
{
    if (!r)
        return;
    free(r->bytes);
    free(r->start);
    free(r->table);
    free(r->entry);
    free(r->entry_id);
    free(r);
}

API Rows *ck_rows_new(void)
{
    Rows *r = calloc(1, sizeof(Rows));
    if (!r)
        return NULL;
    r->slots = 1024;
    r->table = calloc((size_t)r->slots, sizeof(int32_t));
    if (!r->table || !grow((void **)&r->start, &r->texts_room, 64, sizeof(int64_t))) {
        ck_rows_free(r);
        return NULL;
    }
    r->start[0] = 0;
    return r;
}

static uint64_t hash_of(const uint8_t *text, int64_t length)
{
    uint64_t h = 0xCBF29CE484222325u; /* FNV-1a */
    for (int64_t i = 0; i < length; i++)
        h = (h ^ text[i]) * 0x100000001B3u;
    return h ^ h >> 29;
}

/* Where the text stands in the table, or the free slot for it; NONE after more than PROBES looks, which texts that were
   made to collide would need. */
static int64_t slot_of(const Rows *r, const uint8_t *text, int64_t length)
{
    uint64_t mask = (uint64_t)r->slots - 1, at = hash_of(text, length) & mask;
    for (int looks = 0; r->table[at]; at = (at + 1) & mask) {
        int64_t id = r->table[at] - 1, start = r->start[id];
        if (r->start[id + 1] - start == length && !memcmp(r->bytes + start, text, (size_t)length))
            break;
        if (++looks > PROBES)
            return NONE;
    }
    return (int64_t)at;
}

static int widen_table(Rows *r)
{
    int32_t *wide = calloc((size_t)r->slots * 2, sizeof(int32_t));
    if (!wide)
        return 0;
    uint64_t mask = (uint64_t)r->slots * 2 - 1;
    for (int64_t id = 0; id < r->texts; id++) {
        uint64_t at = hash_of(r->bytes + r->start[id], r->start[id + 1] - r->start[id]) & mask;
        while (wide[at])
            at = (at + 1) & mask;
        wide[at] = (int32_t)id + 1;
    }
    free(r->table);
    r->table = wide;
    r->slots *= 2;
    return 1;
}

/* The id of a text, NONE where there is no memory or no room in the table for it. */
API int64_t ck_rows_intern(Rows *r, const uint8_t *text, int64_t length)
{
    int64_t at = slot_of(r, text, length);
    if (at != NONE && r->table[at])
        return r->table[at] - 1;
    if (at == NONE || r->texts >= INT32_MAX - 2 || !grow((void **)&r->bytes, &r->room, r->used + length, 1) ||
        !grow((void **)&r->start, &r->texts_room, r->texts + 2, sizeof(int64_t)))
        return NONE;
    if (2 * r->texts >= r->slots) {
        if (!widen_table(r))
            return NONE;
        at = slot_of(r, text, length);
        if (at == NONE)
            return NONE;
    }
    memcpy(r->bytes + r->used, text, (size_t)length);
    r->used += length;
    r->table[at] = (int32_t)r->texts + 1;
    r->start[++r->texts] = r->used;
    return r->texts - 1;
}

API int64_t ck_rows_texts(const Rows *r)
{
    return r->texts;
}

/* The bytes of text `id`, its length in `length`; NULL where there is none. */
API const uint8_t *ck_rows_text(const Rows *r, int64_t id, int64_t *length)
{
    if (id < 0 || id >= r->texts)
        return NULL;
    *length = r->start[id + 1] - r->start[id];
    return r->bytes + r->start[id];
}

/* Memo entry `index`, behind all that came before, is text `id`. 0 where there is no memory. */
API int ck_rows_remember(Rows *r, int64_t index, int64_t id)
{
    int64_t room = r->entries_room;
    if (!grow((void **)&r->entry, &room, r->entries + 1, sizeof(int64_t)))
        return 0;
    if (room != r->entries_room) {
        int32_t *ids = realloc(r->entry_id, (size_t)room * sizeof(int32_t));
        if (!ids)
            return 0; /* entries_room stays as it was: both have room for that much */
        r->entry_id = ids;
        r->entries_room = room;
    }
    r->entry[r->entries] = index;
    r->entry_id[r->entries++] = (int32_t)id;
    return 1;
}

/* The id of the text that memo entry `index` is, NONE where it is none. */
API int64_t ck_rows_recall(const Rows *r, int64_t index)
{
    int64_t low = 0, high = r->entries;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (r->entry[middle] < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low < r->entries && r->entry[low] == index ? r->entry_id[low] : NONE;
}

/* -- opcodes ------------------------------------------------------------------------------------------------------- */

/* The next opcode, frames skipped; NONE at the end of the window, or before a frame that leaves the stream. */
static int opcode(Cursor *c)
{
    for (;;) {
        if (c->at >= c->size)
            return NONE;
        int op = c->data[c->at];
        if (op != 0x95) {
            c->at++;
            c->opcodes++;
            return op;
        }
        if (c->size - c->at < 9)
            return NONE;
        uint64_t length;
        memcpy(&length, c->data + c->at + 1, 8);
        if (length > (uint64_t)(c->end - c->at - 9))
            return NONE;
        c->at += 9;
        c->opcodes++;
    }
}

static int expect(Cursor *c, int wanted)
{
    return opcode(c) == wanted;
}

/* A MEMOIZE, where there is one. */
static int memoized(Cursor *c)
{
    if (c->at < c->size && c->data[c->at] == 0x94) {
        c->at++;
        c->opcodes++;
        c->memo++;
        return 1;
    }
    return 0;
}

/* `n` bytes of an opcode's argument as an unsigned number. 0: they are not in the window. */
static int argument(Cursor *c, int n, uint64_t *value)
{
    if (c->size - c->at < n)
        return 0;
    *value = 0;
    for (int i = 0; i < n; i++)
        *value |= (uint64_t)c->data[c->at + i] << 8 * i;
    c->at += n;
    return 1;
}

/* A number from 0 to 2^63 - 1 whose opcode was read. */
static int number(Cursor *c, int op, int64_t *value)
{
    uint64_t read = 0, nbytes = 0;
    int fits;
    switch (op) {
    case 'K': fits = argument(c, 1, &read); break;
    case 'M': fits = argument(c, 2, &read); break;
    case 'J': fits = argument(c, 4, &read) && read < UINT64_C(1) << 31; break;
    case 0x8A:
        fits = argument(c, 1, &nbytes) && nbytes <= 8 && argument(c, (int)nbytes, &read) &&
               (!nbytes || !(read >> (8 * nbytes - 1)));
        break;
    default: return 0;
    }
    *value = (int64_t)read;
    return fits;
}

/* The memo index of a GET whose opcode was read. */
static int fetched(Cursor *c, int op, int64_t *index)
{
    uint64_t read;
    if (!(op == 'h' ? argument(c, 1, &read) : op == 'j' && argument(c, 4, &read)))
        return 0;
    *index = (int64_t)read;
    return 1;
}

/* A GET of the name or text `id`, which there may have been no room for. last: the memo index that was it before. */
static int name(Rows *r, Cursor *c, int64_t id, int64_t *last)
{
    int64_t index;
    if (!fetched(c, opcode(c), &index))
        return 0;
    if (index != *last) {
        if (id == NONE || index >= c->memo || ck_rows_recall(r, index) != id)
            return 0;
        *last = index;
    }
    return 1;
}

/* A text, in full or fetched. last: the memo index that was fetched before, last_id: its text. */
static int64_t text(Rows *r, Cursor *c, int64_t *last, int64_t *last_id)
{
    int op = opcode(c);
    if (op == 0x8C) {
        uint64_t length;
        if (!argument(c, 1, &length) || c->size - c->at < (int64_t)length)
            return NONE;
        const uint8_t *start = c->data + c->at;
        for (uint64_t i = 0; i < length; i++)
            if (start[i] >= 0x80)
                return NONE;
        c->at += (int64_t)length;
        int64_t id = ck_rows_intern(r, start, (int64_t)length);
        if (id != NONE && memoized(c) && !ck_rows_remember(r, c->memo - 1, id))
            return NONE;
        return id;
    }
    int64_t index;
    if (!fetched(c, op, &index) || index >= c->memo)
        return NONE;
    if (index != *last) {
        int64_t id = ck_rows_recall(r, index);
        if (id == NONE || (r->start[id + 1] > r->start[id] && r->bytes[r->start[id]] == SYMBOL))
            return NONE;
        *last = index;
        *last_id = id;
    }
    return *last_id;
}

/* torch.Size of at most DIMS numbers: its dims, NONE where it is none. */
static int size_of(Rows *r, Cursor *c, int64_t id, int64_t *last, int64_t *numbers)
{
    if (!name(r, c, id, last))
        return NONE;
    int dims = 0, marked = c->at < c->size && c->data[c->at] == '(', op;
    if (marked)
        opcode(c);
    for (;; dims++) {
        op = opcode(c);
        if (op == ')' || op == 0x85 || op == 0x86 || op == 0x87 || op == 't')
            break;
        if (dims == DIMS || !number(c, op, numbers + dims))
            return NONE;
    }
    int stated = op == ')' ? 0 : op == 't' ? dims : op - 0x84;
    if (stated != dims || marked != (op == 't'))
        return NONE;
    if (op != ')')
        memoized(c);
    if (!expect(c, 0x85))
        return NONE;
    memoized(c);
    if (!expect(c, 'R'))
        return NONE;
    memoized(c);
    return dims;
}

/* Rows from data[at] on, as many as follow `program` (pairs: a step and its id). size: of the window; end: of the
   stream, counted as `at` is. */
API void ck_rows_take(Rows *r, const uint8_t *data, int64_t at, int64_t size, int64_t end, int64_t memo,
                      int64_t opcodes, const int64_t *program, int64_t steps, Taken *out)
{
    int64_t last[STEPS], last_id[STEPS], ids = 0, ints = 0, sizes = 0;
    Cursor c = {data, at, size, end, memo, 0};
    out->rows = out->numbers = out->opcodes = 0;
    out->at = at;
    out->memo = memo;
    if (steps > STEPS)
        return;
    for (int i = 0; i < STEPS; i++)
        last[i] = NONE;
    while (out->rows < out->rows_room) {
        int64_t entries = r->entries, numbers = out->numbers;
        for (int64_t i = 0; i < steps; i++) {
            int64_t id = program[2 * i + 1], value = 0;
            int fits = 0, op;
            switch (program[2 * i]) {
            case NAME: fits = name(r, &c, id, last + i); break;
            case OPEN:
                fits = expect(&c, ')') && expect(&c, 0x81);
                memoized(&c);
                fits = fits && expect(&c, '}');
                memoized(&c);
                fits = fits && expect(&c, '(');
                break;
            case TEXT:
                value = text(r, &c, last + i, last_id + i);
                fits = value != NONE;
                out->ids[ids++] = (int32_t)value;
                break;
            case INT:
                fits = number(&c, opcode(&c), &value);
                out->ints[ints++] = value;
                break;
            case SKIP:
                op = opcode(&c);
                fits = op == 'N' || number(&c, op, &value);
                break;
            case SIZE:
                if (out->sizes_room - numbers >= DIMS) {
                    int dims = size_of(r, &c, id, last + i, out->sizes + numbers);
                    fits = dims != NONE;
                    out->dims[sizes++] = (uint8_t)dims;
                    numbers += fits ? dims : 0;
                }
                break;
            case CLOSE: fits = expect(&c, 'u') && expect(&c, 'b'); break;
            }
            if (!fits) {
                r->entries = entries;
                return;
            }
        }
        if (c.opcodes > opcodes) {
            r->entries = entries;
            return;
        }
        out->rows++;
        out->numbers = numbers;
        out->at = c.at;
        out->memo = c.memo;
        out->opcodes = c.opcodes;
    }
}
