#!/bin/sh
# A C compiler that keeps its objects:  cached_cc.sh gcc -Wall -Wextra -O2 -c file.c -o file.o
#
# Most guards compile the same files. An object is taken from build/objects-of-tests if the same compiler has compiled
# the same preprocessed text with the same options, without debugging information. Only what compiled under -Wall and
# -Wextra without a word is kept. So -Werror would find nothing in what is kept. Other commands are passed on.
#
# Beside an object stand the processor seconds before and after its compilation. If CACHED_CC_LOG names a file, each use
# of an object adds six lines there: the seconds of this script until now, and those of the object (object_cache.py).
case $1 in -*) set -- gcc "$@" ;; esac
compiler=$1
shift

compiles='' source='' object='' warns='' options='' level='' debug=-g0 other='' next=''
for word; do # the words but -c and -o become "$@"
    shift
    case $next,$word in
    object,*) object=$word next='' && continue ;;
    skip,*) next='' ;;
    ,-c) compiles=yes && continue ;;
    ,-o) next=object && continue ;;
    ,-I | ,-D | ,-U | ,-MF | ,-include | ,-isystem) next=skip ;;
    ,-Wall | ,-Wextra) warns=$warns$word ;;
    ,-I* | ,-D* | ,-U* | ,-MD | ,-Werror | ,-pthread) ;; # for the preprocessor, or without effect on the object
    ,-E | ,-S | ,-w | ,-M* | ,-x | ,-l* | ,-L* | ,-shared) other=yes ;;
    ,-O*) level=$word ;;
    ,-g*) debug=$word ;;
    ,-*) options="$options $word" ;;
    ,*.c) [ -z "$source" ] && source=$word || other=yes ;;
    *) other=yes ;;
    esac
    set -- "$@" "$word"
done
case $other,$compiles,$source,$object,$warns,$debug in
,yes,?*,?*,*-Wall*-Wextra,-g0) ;;
*) exec "$compiler" "$@" ${compiles:+-c} ${object:+-o "$object"} ;;
esac

cache=${0%/*}/../build/objects-of-tests
text=$(mktemp "$cache/text.XXXXXX") || exit
trap 'rm -f "$text"' EXIT
"$compiler" "$@" -E -P -o "$text" || exit
options=$(printf '%s\n' $options | sort -u)
version=$("$compiler" --version) || exit
echo "${version#* } $options $level" >>"$text" || exit # gcc may have several names
key=$(sha256sum <"$text") || exit
kept=$cache/${key%% *}

if [ ! -e "$kept.o" ]; then
    exec 9>"$kept.lock"
    flock 9 # another process may compile the same text
fi
if [ ! -e "$kept.o" ]; then
    times >"$kept.times"
    "$compiler" "$@" -c -o "$object" >"$text" 2>&1
    status=$?
    times >>"$kept.times"
    cat "$text" >&2
    if [ $status -ne 0 ] || [ -s "$text" ]; then exit $status; fi
    cp "$object" "$kept.new" && mv "$kept.new" "$kept.o" || exit
fi
touch "$kept.o" "$kept.times" # object_cache.py removes what no test has used for a long time
if [ -n "$CACHED_CC_LOG" ]; then
    times >"$text"
    cat "$kept.times" >>"$text"
    cat "$text" >>"$CACHED_CC_LOG"
fi
cp "$kept.o" "$object"
