# What npu-smi and hccn_tool print of dies to which things happen. Variables: `week`, a file; `count`, that of
# readings (calls of `npu-smi info`) so far; `kind`, what is asked; `npu` or `die`, of whom.
#
# A line of the file: READING DIE FIGURE VALUE. From that reading on, the figure has that value: health,
# temperature, gone, single_bit, double_bit, pages_to_isolate, link, downs, bad_packets.
BEGIN {
    while ((getline line <week) > 0) {
        split(line, word)
        if (line !~ /^(#|$)/ && word[1] <= count) now[word[2], word[3]] = word[4]
    }
    index_ = -1
}

function set(figure, of) {  # the value after the colon
    if ((of, figure) in now) sub(/:.*/, ": " now[of, figure])
}

kind == "info" && /^\| [0-9]+ +[A-Z0-9]/ && !second {  # the first row of a die
    second = 1; index_++
    n = split($0, cell, "|")
    if ((index_, "health") in now) cell[3] = sprintf(" %-14s", now[index_, "health"])
    if ((index_, "temperature") in now) {
        match(cell[4], /^ +[0-9.-]+ +/)
        rest = substr(cell[4], RLENGTH + 1)
        sub(/^[0-9]+/, sprintf("%-2s", now[index_, "temperature"]), rest)
        cell[4] = substr(cell[4], 1, RLENGTH) rest
    }
    if (!((index_, "gone") in now)) print "|" cell[2] "|" cell[3] "|" cell[4] "|"
    next
}
kind == "info" && second { second = 0; if ((index_, "gone") in now) next }

kind == "ecc" && /Chip Count/ { chips = $NF }
kind == "ecc" { die = npu * (chips ? chips : 1) + chip }
/HBM Single Bit Error/ { set("single_bit", die) }
/HBM Double Bit Error/ { set("double_bit", die) }
/HBM Double Bit Next/ { set("pages_to_isolate", die) }
kind == "ecc" && /Chip ID/ { chip++ }

kind == "link" { set("link", die) }
/link down count/ { set("downs", die) }
/^mac_rx_bad_pkt_num/ { set("bad_packets", die) }

{ print }
