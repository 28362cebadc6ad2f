// The orders in which products of BF16 values are added to a sum; arithmetic.md defines them under "Products".
#pragma once

namespace fb {

enum Order { ONE_BY_ONE, PAIRS, TILES };

}  // namespace fb
