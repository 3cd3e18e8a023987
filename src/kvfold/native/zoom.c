/* Attention of one query at two resolutions: what kvfold.zoom.attention.zoom_attention computes for
   spans that a sketch ranks and whose tokens are in memory as they are, in one pass over each.

   Every row of a batch and kv head ("owner") is on its own; the R query heads that share it are done
   together, so that a number is read, and widened, once. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

enum { BLOCK = 256, LANES = 16, LINE = 64, FLOAT = 0, HALF = 1, NO_MEMORY = -1, DAMAGED = -2 };
static const float NOWHERE = -1e30f; /* Logarithm of no weight; infinity would make NaN. */

typedef struct {
    const float *query;              /* [owners, R, D], scaled */
    const void *look;                /* [owners, D, 2P + 1] */
    const uint8_t *codes;            /* [owners, P, T], code_room and line_room apart */
    const int64_t *starts, *ends;    /* [B, S], rows span_room apart */
    const float *keys, *values;      /* [owners, N, D], owners near_room apart */
    const uint8_t *visible;          /* [B, N], or null where all are */
    const void *means;               /* [owners, S, D], owners mean_room apart */
    const void *tokens;              /* [owners, T, 2D], owners token_room apart */
    float *output;                   /* [owners, R, D] */
    int64_t batch, groups, heads, width, bytes, tokens_held, spans, near, expanded;
    int64_t code_room, line_room, span_room, near_room, visible_room, mean_room, token_room;
    int64_t precision;               /* of look, means and tokens */
    int64_t threads;
} Zoom;

static inline float half_to_float(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    union { uint32_t bits; float number; } wide = {(uint32_t)(half & 0x7fff) << 13};
    if ((half & 0x7c00) == 0x7c00) wide.bits |= 0x7f800000;
    else wide.number *= 0x1p112f;
    wide.bits |= (uint32_t)(half & 0x8000) << 16;
    return wide.number;
#endif
}

/* Some numbers in float32: themselves, or widened into room. */
static inline const float *widened(const void *numbers, int64_t at, int64_t count, int64_t precision,
                                   float *room) {
    if (precision == FLOAT) return (const float *)numbers + at;
    const uint16_t *halves = (const uint16_t *)numbers + at;
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
#endif
    for (; i < count; i++) room[i] = half_to_float(halves[i]);
    return room;
}

/* e^x for x <= 0, to a unit in the last place; 0 where it would be denormal, NaN of NaN. */
static inline float exponential(float x) {
    float kept = x >= -87.0f ? x : -87.0f;
    float n = __builtin_rintf(kept * 1.44269504f);
    float r = kept - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t bits; float number; } power = {(uint32_t)((int32_t)n + 127) << 23};
    return x >= -87.0f ? p * power.number : x < -87.0f ? 0.0f : x;
}

static inline float dot(const float *a, const float *b, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static inline void add_scaled(float *sum, const float *numbers, float weight, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] += weight * numbers[i];
}

/* Exponentials of numbers less the highest, in place; returns their sum. */
static inline float exponentials(float *numbers, int64_t count, float highest) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        float number = exponential(numbers[i] - highest);
        numbers[i] = number;
        sum += number;
    }
    return sum;
}

/* The largest, and at least `found`; NaN is passed over, as it shows in every sum. */
static inline float largest(const float *numbers, int64_t count, float found) {
    float lanes[LANES];
    int64_t i = 0;
    for (int64_t j = 0; j < LANES; j++) lanes[j] = found;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; j++)
            lanes[j] = numbers[i + j] > lanes[j] ? numbers[i + j] : lanes[j];
    for (; i < count; i++) found = numbers[i] > found ? numbers[i] : found;
    for (int64_t j = 0; j < LANES; j++) found = lanes[j] > found ? lanes[j] : found;
    return found;
}

typedef struct {
    float *coefficients;  /* [R, 2P + 1] */
    float *scores;        /* [R, T]: estimates, then their exponentials */
    float *near;          /* [R, N] */
    float *masses;        /* [R, S] */
    float *inside;        /* [R, T]: of the tokens of expanded spans */
    float *shares, *copy; /* [S] */
    float *totals;        /* [R] */
    int64_t *chosen;      /* [E] */
    float *row;           /* [max(2D, 2P + 1)] */
    float *low, *both;    /* [BLOCK] */
} Room;

/* Scores of the tokens of spans, estimated from their codes; see kvfold.ops.quantize. */
static void estimate(const Zoom *z, int64_t owner, const float *query, Room *room) {
    int64_t count = 2 * z->bytes + 1;
    memset(room->coefficients, 0, sizeof(float) * z->heads * count);
    for (int64_t d = 0; d < z->width; d++) {
        const float *look =
            widened(z->look, (owner * z->width + d) * count, count, z->precision, room->row);
        for (int64_t r = 0; r < z->heads; r++)
            add_scaled(room->coefficients + r * count, look, query[r * z->width + d], count);
    }
    const uint8_t *codes = z->codes + owner * z->code_room;
    memset(room->scores, 0, sizeof(float) * z->heads * z->tokens_held);
    for (int64_t first = 0; first < z->tokens_held; first += BLOCK) {
        int64_t length = z->tokens_held - first < BLOCK ? z->tokens_held - first : BLOCK;
        for (int64_t p = 0; p < z->bytes; p++) {
            const uint8_t *line = codes + p * z->line_room + first;
            for (int64_t t = 0; t < length; t++) {
                room->low[t] = (float)(line[t] & 15);
                room->both[t] = (float)line[t];
            }
            for (int64_t r = 0; r < z->heads; r++) {
                const float *seen = room->coefficients + r * count;
                float of_low = seen[p], of_both = seen[z->bytes + p];
                float *scores = room->scores + r * z->tokens_held + first;
                for (int64_t t = 0; t < length; t++)
                    scores[t] += of_low * room->low[t] + of_both * room->both[t];
            }
        }
    }
}

/* The logarithm of what each span weighs, from estimated scores. */
static void weigh(const Zoom *z, int64_t owner, Room *room) {
    const int64_t *starts = z->starts + owner / z->groups * z->span_room;
    const int64_t *ends = z->ends + owner / z->groups * z->span_room;
    for (int64_t r = 0; r < z->heads; r++) {
        float *scores = room->scores + r * z->tokens_held;
        float *masses = room->masses + r * z->spans;
        float level = room->coefficients[r * (2 * z->bytes + 1) + 2 * z->bytes];
        float highest = largest(scores, z->tokens_held, NOWHERE);
        exponentials(scores, z->tokens_held, highest);
        for (int64_t s = 0; s < z->spans; s++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t t = starts[s]; t < ends[s]; t++) sum += scores[t];
            masses[s] = sum;
        }
        for (int64_t s = 0; s < z->spans; s++) {
            float least = masses[s] < 1.2e-38f ? 1.2e-38f : masses[s];
            masses[s] = starts[s] == ends[s] ? NOWHERE : __builtin_logf(least) + highest + level;
        }
    }
}

static void read_near(const Zoom *z, int64_t owner, const float *query, Room *room) {
    const float *keys = z->keys + owner * z->near_room;
    const uint8_t *visible =
        z->visible ? z->visible + owner / z->groups * z->visible_room : NULL;
    for (int64_t n = 0; n < z->near; n++)
        for (int64_t r = 0; r < z->heads; r++)
            room->near[r * z->near + n] = visible && !visible[n]
                ? NOWHERE
                : dot(query + r * z->width, keys + n * z->width, z->width);
}

/* The value that `rank` of the numbers exceed or equal; they are put in another order. */
static float value_of_rank(float *numbers, int64_t count, int64_t rank) {
    int64_t low = 0, high = count - 1, target = rank - 1;
    while (low < high) {
        float pivot = numbers[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (i <= high && numbers[i] > pivot) i++;
            while (j >= low && numbers[j] < pivot) j--;
            if (i <= j) {
                float other = numbers[i];
                numbers[i++] = numbers[j];
                numbers[j--] = other;
            }
        }
        if (target <= j) high = j;
        else if (target >= i) low = i;
        else break;
    }
    return numbers[target];
}

/* The spans with the largest share of any head; returns how many. */
static int64_t choose(const Zoom *z, Room *room) {
    int64_t spans = z->spans, wanted = z->expanded < spans ? z->expanded : spans, found = 0;
    memset(room->shares, 0, sizeof(float) * spans);
    for (int64_t r = 0; r < z->heads; r++) {
        const float *near = room->near + r * z->near, *masses = room->masses + r * spans;
        float highest = largest(masses, spans, largest(near, z->near, NOWHERE)), total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t n = 0; n < z->near; n++) total += exponential(near[n] - highest);
        memcpy(room->copy, masses, sizeof(float) * spans);
        total += exponentials(room->copy, spans, highest);
        for (int64_t s = 0; s < spans; s++) {
            float share = room->copy[s] / total;
            room->shares[s] = share > room->shares[s] ? share : room->shares[s];
        }
    }
    memcpy(room->copy, room->shares, sizeof(float) * spans);
    float least = wanted > 0 ? value_of_rank(room->copy, spans, wanted) : 2;
    for (int64_t s = 0; s < spans && found < wanted; s++)
        if (room->shares[s] > least) room->chosen[found++] = s;
    for (int64_t s = 0; s < spans && found < wanted; s++)
        if (room->shares[s] == least) room->chosen[found++] = s;
    return found;
}

/* Ask for the keys and values of a span, which stand anywhere in memory, ahead of their use. */
static void prefetch(const Zoom *z, int64_t owner, int64_t start, int64_t end) {
    int64_t size = z->precision == FLOAT ? 4 : 2, token = 2 * z->width * size;
    const char *first = (const char *)z->tokens + owner * z->token_room * size + start * token;
    for (int64_t i = 0; i < (end - start) * token; i += LINE) __builtin_prefetch(first + i);
}

/* Whether spans are where tokens are: they may come from a damaged file. */
static int64_t are_ranges(const Zoom *z, int64_t row) {
    const int64_t *starts = z->starts + row * z->span_room, *ends = z->ends + row * z->span_room;
    for (int64_t s = 0; s < z->spans; s++)
        if (starts[s] < 0 || ends[s] < starts[s] || ends[s] > z->tokens_held) return 0;
    return 1;
}

/* Scores of the tokens of expanded spans, which then have no mass of their own. Returns how many
   tokens there are, or DAMAGED where spans overlap so much that there is no room for them. */
static int64_t read_inside(const Zoom *z, int64_t owner, const float *query, int64_t found,
                           Room *room) {
    const int64_t *starts = z->starts + owner / z->groups * z->span_room;
    const int64_t *ends = z->ends + owner / z->groups * z->span_room;
    int64_t read = 0;
    for (int64_t e = 0; e < found; e++) {
        int64_t s = room->chosen[e], next = room->chosen[e + 1 < found ? e + 1 : e];
        if (read + ends[s] - starts[s] > z->tokens_held) return DAMAGED;
        prefetch(z, owner, starts[next], ends[next]);
        for (int64_t t = starts[s]; t < ends[s]; t++, read++) {
            int64_t at = owner * z->token_room + t * 2 * z->width;
            const float *key = widened(z->tokens, at, z->width, z->precision, room->row);
            for (int64_t r = 0; r < z->heads; r++)
                room->inside[r * z->tokens_held + read] = dot(query + r * z->width, key, z->width);
        }
        for (int64_t r = 0; r < z->heads; r++) room->masses[r * z->spans + s] = NOWHERE;
    }
    return read;
}

/* One softmax over all scores, in place; the sums that it is to be divided by are left aside. */
static void soften(const Zoom *z, int64_t read, Room *room) {
    for (int64_t r = 0; r < z->heads; r++) {
        float *near = room->near + r * z->near, *masses = room->masses + r * z->spans;
        float *inside = room->inside + r * z->tokens_held;
        float highest = largest(near, z->near, NOWHERE);
        highest = largest(inside, read, largest(masses, z->spans, highest));
        float total = exponentials(near, z->near, highest);
        total += exponentials(masses, z->spans, highest);
        total += exponentials(inside, read, highest);
        /* Nothing is seen: an answer would be made up. */
        room->totals[r] = highest == NOWHERE ? __builtin_nanf("") : total;
    }
}

/* The weighted sum of all values. */
static void sum_up(const Zoom *z, int64_t owner, int64_t found, Room *room) {
    int64_t heads = z->heads, width = z->width, read = 0;
    const int64_t *starts = z->starts + owner / z->groups * z->span_room;
    const int64_t *ends = z->ends + owner / z->groups * z->span_room;
    const float *values = z->values + owner * z->near_room;
    float *output = z->output + owner * heads * width;
    memset(output, 0, sizeof(float) * heads * width);
    for (int64_t n = 0; n < z->near; n++)
        for (int64_t r = 0; r < heads; r++)
            add_scaled(output + r * width, values + n * width, room->near[r * z->near + n], width);
    for (int64_t s = 0; s < z->spans; s++) {
        int64_t at = owner * z->mean_room + s * width;
        const float *mean = widened(z->means, at, width, z->precision, room->row);
        for (int64_t r = 0; r < heads; r++)
            add_scaled(output + r * width, mean, room->masses[r * z->spans + s], width);
    }
    for (int64_t e = 0; e < found; e++) {
        int64_t s = room->chosen[e];
        for (int64_t t = starts[s]; t < ends[s]; t++, read++) {
            int64_t at = owner * z->token_room + (2 * t + 1) * width;
            const float *value = widened(z->tokens, at, width, z->precision, room->row);
            const float *weight = room->inside + read;
            for (int64_t r = 0; r < heads; r++)
                add_scaled(output + r * width, value, weight[r * z->tokens_held], width);
        }
    }
    for (int64_t r = 0; r < heads; r++)
        for (int64_t d = 0; d < width; d++) output[r * width + d] /= room->totals[r];
}

/* One owner; returns the tokens read of expanded spans, or DAMAGED. */
static int64_t attend(const Zoom *z, int64_t owner, Room *room) {
    const float *query = z->query + owner * z->heads * z->width;
    if (!are_ranges(z, owner / z->groups)) return DAMAGED;
    estimate(z, owner, query, room);
    weigh(z, owner, room);
    read_near(z, owner, query, room);
    int64_t found = choose(z, room), read = read_inside(z, owner, query, found, room);
    if (read == DAMAGED) return DAMAGED;
    soften(z, read, room);
    sum_up(z, owner, found, room);
    return read;
}

static float *take(float **free_from, int64_t count) {
    float *taken = *free_from;
    *free_from += count;
    return taken;
}

/* Attends for every owner. Returns the tokens read of expanded spans, or NO_MEMORY or DAMAGED.

   Threads are as many as torch has: its runtime is the same, and makes them anew for each change. */
int64_t zoom_attend(const Zoom *z) {
    int64_t heads = z->heads, spans = z->spans, row = 2 * z->width + 2 * z->bytes + 1;
    size_t floats = heads * (2 * z->bytes + 2 + 2 * z->tokens_held + z->near + spans) + 2 * spans +
                    row + 2 * BLOCK;
    int64_t read = 0, failed = 0;
#pragma omp parallel for num_threads(z->threads) reduction(+ : read) reduction(min : failed) \
    schedule(dynamic)
    for (int64_t owner = 0; owner < z->batch * z->groups; owner++) {
        char *memory = malloc(sizeof(int64_t) * (spans + 1) + sizeof(float) * floats);
        if (memory == NULL) {
            failed = NO_MEMORY;
            continue;
        }
        float *from = (float *)(memory + sizeof(int64_t) * (spans + 1));
        Room room = {.chosen = (int64_t *)memory};
        room.coefficients = take(&from, heads * (2 * z->bytes + 1));
        room.scores = take(&from, heads * z->tokens_held);
        room.inside = take(&from, heads * z->tokens_held);
        room.near = take(&from, heads * z->near);
        room.masses = take(&from, heads * spans);
        room.shares = take(&from, spans);
        room.copy = take(&from, spans);
        room.totals = take(&from, heads);
        room.row = take(&from, row);
        room.low = take(&from, BLOCK);
        room.both = take(&from, BLOCK);
        int64_t found = attend(z, owner, &room);
        if (found == DAMAGED) failed = DAMAGED;
        else read += found;
        free(memory);
    }
    return failed ? failed : read;
}
